(()=>{'use strict';
const get=id=>document.getElementById(id),data=JSON.parse(get('data').textContent),runs=data.runs;
const NB='\u00a0',SVG='http://www.w3.org/2000/svg';
const put=(tag,words,more={})=>{const e=document.createElement(tag);if(words!==undefined)e.textContent=words;
for(const k in more)e.setAttribute(k,more[k]);return e};
const draw=(tag,more)=>{const e=document.createElementNS(SVG,tag);for(const k in more)e.setAttribute(k,more[k]);return e};
const share=figure=>figure[4];
const signed=v=>(v>=0?'+':'−')+Math.abs(v).toFixed(1);
const fill=(select,names,at)=>{names.forEach((name,i)=>select.append(put('option',name,{value:i})));select.value=at};
const row=(name,cells)=>{const r=put('tr'),h=put('th',undefined,{scope:'row'});h.append(put('bdi',name));r.append(h);
for(const c of cells)r.append(c instanceof Node?c:put('td',c));return r};

// Newcombe's interval of a difference, as run_findings.difference
const less=(a,b)=>{const d=b[0]-a[0],lo=Math.hypot(b[0]-b[1],a[2]-a[0]),hi=Math.hypot(b[2]-b[0],a[0]-a[1]);
return [d,Math.max(-1,d-lo),Math.min(1,d+hi)].map(v=>100*v)};
const pair=()=>{const a=runs[get('left').value],b=runs[get('right').value],body=get('pairs');body.replaceChildren();
get('leftname').textContent=a.name;get('rightname').textContent=b.name;
body.append(row('promise',[a.promise,b.promise,'']),row('spent',[a.spent,b.spent,'']));
const alike=a.subject===b.subject;
const one=(name,x,y)=>{const d=alike&&x.length&&y.length?less(x,y):null;
body.append(row(name,[x.length?share(x):'not shown',y.length?share(y):'not shown',
d?signed(d[0])+' ('+signed(d[1])+' to '+signed(d[2])+')':'']))};
one('all',a.overall,b.overall);
const right=new Map(b.groups.map(([name,...v])=>[name,v])),names=new Set(a.groups.map(g=>g[0]));
for(const [name,...v] of a.groups)one(name,v,right.get(name)||[]);
for(const [name,...v] of b.groups)if(!names.has(name))one(name,[],v);
const other=a.promise!==b.promise?'The promises differ: the one that promises less may well be more accurate. ':'';
const hidden=[a,b].filter(r=>r.withheld).map(r=>r.name+': '+r.withheld+'.').join(' ');
const apart=alike?'':'Labels or inputs differ: these runs are not about the same data, so no difference is shown. ';
get('pairnote').textContent=apart+other+hidden};
if(runs.length>1){get('compare').hidden=false;fill(get('left'),runs.map(r=>r.name),0);fill(get('right'),runs.map(r=>r.name),1);
for(const id of ['left','right'])get(id).addEventListener('change',pair);pair()}

const movable=runs.filter(r=>r.strengths.length);
const own=r=>r.strengths.findIndex(s=>s.tau===r.tau);  // -1: answers moved in another way
const bar=([v,l,h])=>{const s=draw('svg',{viewBox:'0 0 320 14',class:'bar','aria-hidden':'true',preserveAspectRatio:'none'});
s.append(draw('rect',{x:0,y:2,width:320,height:10,fill:'var(--tint)'}),draw('rect',{x:0,y:2,width:320*v,height:10,fill:'var(--eh-bar)'}),
draw('path',{d:`M${320*l} 3v8m0-4H${320*h}m0-4v8`,stroke:'currentColor','stroke-width':1.5,fill:'none'}));
const cell=put('td',undefined,{class:'draw'});cell.append(s);return cell};
const move=()=>{const r=movable[get('frun').value],i=+get('tau').value,s=r.strengths[i],base=r.strengths[own(r)],body=get('cells');
body.replaceChildren();get('tauout').textContent=s.tau;get('tau').setAttribute('aria-valuetext','tau '+s.tau);
const same=s===base?', the answers of this run as they are':'';
get('fsay').textContent='At tau '+s.tau+same+': '+share(s.overall)+NB+'% of all held-out records'+
(s.balanced===null?'':', '+(100*s.balanced).toFixed(1)+NB+'% in the mean of the classes')+'.';
for(const [kind,label] of [['classes','class '],['groups','']]){const before=new Map((base?base[kind]:[]).map(([name,...v])=>[name,v]));
for(const [name,...v] of s[kind]){const was=before.get(name);
body.append(row((kind==='classes'?label:'')+name,[v[3].toLocaleString('en'),bar(v),share(v),was?signed(100*(v[0]-was[0])):'']))}}
if(!body.children.length)body.append(row('none may be shown',['','','','']))};
const choose=()=>{const r=movable[get('frun').value];get('tau').max=r.strengths.length-1;get('tau').value=Math.max(0,own(r));move()};
if(movable.length){get('frontier').hidden=false;fill(get('frun'),movable.map(r=>r.name),0);
get('frun').addEventListener('change',choose);get('tau').addEventListener('input',move);choose()}

let turn=0;
const show=figures=>{const body=get('plan').tBodies[0];body.replaceChildren();
for(const name in figures){const r=put('tr');r.append(put('th',name,{scope:'row'}),put('td',figures[name]));body.append(r)}
get('plan').removeAttribute('aria-busy')};
const position=()=>[...document.querySelectorAll('#dials input')].map(e=>+e.value);
const told=()=>[...document.querySelectorAll('#dials input')].forEach((e,i)=>{
const d=runs[get('prun').value].planner.dials[i],words=d.values[e.value];
e.previousElementSibling.textContent=words;e.setAttribute('aria-valuetext',d.name+' '+words)});
const plan=async()=>{const p=runs[get('prun').value].planner,at=position(),kind=data.kinds[get('kind').value],mine=++turn;
if(p.why)return;
if(!data.live)return show({...p.answers[at.join(',')],'Nearest study':p.studies[kind][at[0]]});
get('plan').setAttribute('aria-busy','true');
try{const reply=await fetch(`plan?run=${p.run}&at=${at.join(',')}&kind=${kind}`),figures=await reply.json();
if(mine===turn)show(figures)}
catch{if(mine===turn)show({error:'The server has ended: start evenhand open again.'})}};
const set=()=>{const p=runs[get('prun').value].planner,place=get('dials');place.replaceChildren();get('plan').tBodies[0].replaceChildren();
get('pwhy').textContent=p.why;if(p.why)return;
get('kind').value=data.kinds.indexOf(p.kind);
p.dials.forEach((d,i)=>{const label=put('label',d.name+' ',{for:'dial'+i}),input=put('input',undefined,
{type:'range',id:'dial'+i,min:0,max:d.values.length-1,step:1,value:d.start});
label.append(put('output',undefined,{for:'dial'+i}),input);place.append(label);
input.addEventListener('input',told);input.addEventListener('change',plan)});told();plan()};
if(runs.length){get('planner').hidden=false;fill(get('prun'),runs.map(r=>r.name),0);fill(get('kind'),data.kinds,0);
get('prun').addEventListener('change',set);get('kind').addEventListener('change',plan);set()}
})();
